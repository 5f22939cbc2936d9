from fl_dispatch.table import *
