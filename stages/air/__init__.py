"""The AIR dialect in xDSL: operations, printer, builder, stitching, hardware limits, traffic counts.

Knows the array and its rules; must not know what a transformer is.
"""
