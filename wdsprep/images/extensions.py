"""The names that files of images, and of their captions, end in."""

IMAGES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff"}
    | {"avif", "heic", "heif", "jp2", "j2k", "jpf", "jpx", "mpo", "pbm", "ppm", "pgm", "pnm"}
)
OTHER_IMAGES = frozenset(
    {"jxl", "jxr", "fli", "flc", "svg", "svgz", "ico", "cur", "icns", "psd", "psb", "tga", "pcx"}
    | {"dds", "exr", "hdr", "qoi", "eps", "sgi", "xbm", "xpm", "xcf", "wmf", "emf", "dcm", "fits"}
    | {"djvu", "bpg", "hif", "dng", "cr2", "cr3", "crw", "nef", "arw", "orf", "raf", "rw2", "pef"}
)
"""Extensions of images that nobody decodes here. A file may be another kind by its first bytes; if
not, it is a reject."""
CAPTIONS = (".txt",)
"""Extensions of caption files, unless the user names others."""
