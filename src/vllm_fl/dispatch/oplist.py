from fl_dispatch.hosting.oplist import *
