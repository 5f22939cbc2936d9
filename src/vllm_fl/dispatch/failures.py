from fl_dispatch.failures import *
