"""What torch itself makes of a DCP folder, one file of torch.save: torch_save_job.py FOLDER FILE"""

import sys
import warnings

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

warnings.simplefilter("ignore")
dcp_to_torch_save(sys.argv[1], sys.argv[2])
