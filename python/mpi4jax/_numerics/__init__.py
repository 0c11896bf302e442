"""Private parts of the public modules: solvers, transforms, layouts, blocks."""
