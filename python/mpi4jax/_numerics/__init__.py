"""What public modules made of ops are made of: solvers, transforms, layouts, blocks."""
