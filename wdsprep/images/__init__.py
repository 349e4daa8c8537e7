"""Images: what is recognised as one, what of it is kept, and the crop that the VAE gets.

`pixel_rule` makes a picture fit to be stored, by what `headers` say, `formats` open, and `colour`
turns upright and into sRGB. `nearest_shape` says which part of an image is taken, and `crop` cuts
it out, and takes the mean of a mask. `headers` also has what the names of image files end in, and
`options` has what a user decides: `Limits`.

In: The bytes of an image, whatever made it.
Out: A picture that every trainer can read, or its crop for the VAE; or the code of why not.
"""
