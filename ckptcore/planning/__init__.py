"""From options to a request, and from a request and a manifest to a plan: which bytes go where.

Planning is pure: it writes nothing and reads no tensor bytes. It knows manifests, names, topologies and what
formats arrange; it knows nothing of execution, of the catalog and of where a plan is kept.

    options        `Options`: options of commands and flows
    request        `Request`: the output; `Settings`: memory, threads, device
    compose        `compose`: the plan of a request, with small files; `map_export`: an export's tensors
    export_source  `ExportSource`: the source that an export is compared with
    plan           `Plan` and its folder: `load_head`, `load_file_plan`
    file_plan      `FilePlan`: everything that a worker needs for one output file
    tiles          `Budget`, and the steps of a file that each fit a buffer of it
    rank_layout    which rank of a mesh holds what of a checkpoint, by the rules of `ckptcore.topology`
    model_files, hub_files, model_card
                   files beside an export's weights: find, read, write
    loader_names   names that loaders of an output look for
    zero_tensors   dropped tensors that must be zero
    file_planner, file_forms, reads, nesting, config_folder, meta_model, transformers_conversion,
    transformers_process, kept_answers
                   how a plan is made
"""
