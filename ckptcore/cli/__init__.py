"""The command line: one module for each group of commands; text and JSON of their answers.

Commands parse, call and print. They may import every room below; no room imports this one. What a command
needs is imported inside it, so that `ckptcore inspect` and `--help` start without torch, pydantic and
SQLAlchemy.

    main           the table of commands, `program`, and `run`: ends every command with its exit code
    checkpoints    inspect, validate, diff, fingerprint, verify-export, formats
    conversions    consolidate, export, reshard, plan, apply
    operations     sweep, scrub, retire, thin, gc
    publishing     push, sign, verify-signature
    catalog*       catalog list, show, lineage, rebuild, ...; names, queues, and what they share
    options        declared options as typer has them (`ckptcore.planning.options`)
    render*        answers as text and JSON
    tables         tables with names of tensors
"""
