from fl_dispatch.devices.nvml import *
