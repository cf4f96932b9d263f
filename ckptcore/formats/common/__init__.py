"""What several families of formats share, and no room outside of formats needs.

`join` puts parts of one checkpoint together, `trees` nests names and values, `rank_file_names` knows files
that are named by rank, `optimizer_numbers` names what an optimizer numbers, `shape_matching` finds
parameters by their shapes, `write_assignment` gives each tensor to the rank that writes it. May know
`formats.base` only.
"""
