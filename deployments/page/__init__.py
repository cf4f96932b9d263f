"""The catalog page: look at runs, checkpoints, lineage and exports in a browser, and read the same as JSON.

It reads through `ckptcore.catalog`, as the command line does. `ckptcore catalog page` opens it on this
machine; the receiver serves it if its file has a table ``[page]``.
"""
