from fl_dispatch.run.table import *
