from fl_dispatch.run.keeper import *
