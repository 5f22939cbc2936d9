from fl_dispatch.errors import *
