"""What torch itself makes of DCP folders, each one file of torch.save: torch_save_job.py FOLDER FILE ..."""

import sys
import warnings

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
for folder, file in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dcp_to_torch_save(folder, file)
