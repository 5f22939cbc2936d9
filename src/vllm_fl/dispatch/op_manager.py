from fl_dispatch.op_manager import *
