"""The command line: one module for each group of commands; text and JSON of their answers.

Commands parse, call and show. They may know every room below; no room imports this one. What a command needs
is imported inside it, so that `ckptcore inspect` and `--help` start without torch, pydantic and SQLAlchemy.

    main           the program `app`, and `run`: how a command line ends, with which exit code
    checkpoints    inspect, validate, diff, fingerprint, formats
    conversions    consolidate, export, reshard, plan, apply
    operations     sweep, scrub, retire, catalog rebuild
    catalog*       catalog list, show, lineage, ...; names, queues, and what they share
    options        declared options as typer reads them (`ckptcore.planning.options`)
    render*        answers as text and JSON
"""
