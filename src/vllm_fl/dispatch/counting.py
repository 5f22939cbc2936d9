from fl_dispatch.counting import *
