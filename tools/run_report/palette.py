"""The colours of the report, and what replaces them on a dark page.

They come from the palette of Okabe and Ito (2008, "Color Universal Design"), which works for all
kinds of colour vision.
"""

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
PALE, GREY, OTHER, VIOLET, BROWN = "#CFE8F8", "#C8CCD0", "#8A8F98", "#6A51A3", "#7B4B2A"
MINT, SALMON, OLIVE = "#8FD3B6", "#F2998E", "#A39B2F"
CURVES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, OTHER, VIOLET, BROWN, MINT, SALMON)
GRID, INK = "#E6E8EB", "#1B1F24"  # as in figures.yaml
# What replaces a colour of the light page on a dark one.
ON_DARK = {
    BLACK: "#E6E9ED",
    INK: "#E6E9ED",
    GRID: "#2B323A",
    PALE: "#3F5566",
    GREY: "#5B636D",
    BLUE: "#2E8FD0",
}
