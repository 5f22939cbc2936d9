from fl_dispatch.oplist import *
