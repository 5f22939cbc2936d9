from fl_dispatch.call import *
