from fl_dispatch.discovery import *
