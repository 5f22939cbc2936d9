from fl_dispatch.aten_operators import *
