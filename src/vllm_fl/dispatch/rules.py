from fl_dispatch.rules import *
