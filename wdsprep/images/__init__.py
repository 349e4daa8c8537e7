"""Images: what is recognised as one, what of it is kept, and the crop that the VAE gets."""

IMAGES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff"}
    | {"avif", "heic", "heif", "jp2", "j2k", "jpf", "jpx", "mpo", "pbm", "ppm", "pgm", "pnm"}
)
OTHER_IMAGES = frozenset(
    {"jxl", "jxr", "fli", "flc", "svg", "svgz", "ico", "cur", "icns", "psd", "psb", "tga", "pcx"}
    | {"dds", "exr", "hdr", "qoi", "eps", "sgi", "xbm", "xpm", "xcf", "wmf", "emf", "dcm", "fits"}
    | {"djvu", "bpg", "hif", "dng", "cr2", "cr3", "crw", "nef", "arw", "orf", "raf", "rw2", "pef"}
)
"""What nobody decodes here, as far as a name tells: by their first bytes they may be something
else, and if not, each is a reject."""
