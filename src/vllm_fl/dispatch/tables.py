from fl_dispatch.tables import *
