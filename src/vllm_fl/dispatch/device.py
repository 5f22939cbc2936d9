from fl_dispatch.devices import *
