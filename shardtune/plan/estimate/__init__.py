"""Pure functions of a layout, a model's shape, a mesh and a cluster: memory, traffic, time."""
