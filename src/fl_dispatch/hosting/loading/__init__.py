"""The account of a load: the parameters that tensors filled, and the errors that refuse the rest."""
