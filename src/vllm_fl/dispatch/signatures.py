from fl_dispatch.signatures import *
