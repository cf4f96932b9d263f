"""Provide what several families of formats share, and no room outside of formats needs.

`join` merges the manifests of parts, `trees` nests names and values, `rank_file_names` recognises files named
by rank, `optimizer_numbers` names numbered optimizer states, `write_assignment` assigns each box to the rank
that writes it, `files_beside` asks whether other files belong to a model. May import `formats.base` only.
"""
