"""SGLang's own choices and kernels next to our operators, and every difference between its versions."""
