"""From options to a request, and from a request and a manifest to a plan: which bytes go where.

Planning is pure: it writes nothing and reads no tensor bytes. It knows manifests, names, topologies and what
formats arrange; it knows nothing of execution, of the catalog and of where a plan is kept.

    options        `Options`: how a conversion is spelled, for commands and flows
    request        `Request`, what to make; `Settings`, with what means
    compose        `compose`: the plan of a request, with what is around it; `map_export`: an export's tensors
    export_source  `ExportSource`: what an export is held against
    plan           `Plan` and its folder: `load_head`, `load_file_plan`
    file_plan      `FilePlan`: what a worker needs for one output file
    model_files, hub_files, model_card
                   what lies beside an export's weights: found or named, read, told of
    file_planner, reads, nesting, config_folder, meta_model, transformers_conversion, transformers_process
                   how a plan is made
"""
