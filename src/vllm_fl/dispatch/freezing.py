from fl_dispatch.freezing import *
