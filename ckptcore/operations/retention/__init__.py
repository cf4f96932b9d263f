"""Decide what of a run is kept, and delete the rest only where its copy is proven (`ckptcore.custody`).

- retire: `retire`, sources that a verified child replaces
- purge: `purge`, `restore`: delete what was set aside, or bring it back
- thin: `thin`, steps lose their optimizer in their own format and place
- thin_plan: what a checkpoint loses in place, and the proof of what it keeps
- policy: which steps of a run are kept, with reasons
- root_retention: the policy of a watched root
- replacement, part_replacement: find the child that replaces a source, or its model part
- setting_aside: sets a source aside, and brings it back where that fails
"""
