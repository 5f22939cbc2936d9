from fl_dispatch.nvml import *
