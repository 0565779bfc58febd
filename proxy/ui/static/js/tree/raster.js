// Rectangles written directly into pixels: ten thousand in a few milliseconds, without a graphics card.

export class Raster {
  resize(context, width, height) {
    if (this.image?.width === width && this.image?.height === height) return;
    this.image = context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.width = width;
    this.height = height;
  }

  clear(colour) {
    this.pixels.fill(colour);
  }

  /** Fill a rectangle in whole pixels; a visible rectangle is at least one pixel wide and high. */
  rect(x, y, w, h, colour) {
    const x0 = Math.max(0, Math.round(x));
    const y0 = Math.max(0, Math.round(y));
    const x1 = Math.min(this.width, Math.max(Math.round(x) + 1, Math.round(x + w)));
    const y1 = Math.min(this.height, Math.max(Math.round(y) + 1, Math.round(y + h)));
    const { pixels, width } = this;
    if (x1 - x0 === 1) {
      for (let at = y0 * width + x0, end = y1 * width + x0; at < end; at += width) pixels[at] = colour;
      return;
    }
    if (x1 <= x0) return;
    for (let row = y0; row < y1; row++) pixels.fill(colour, row * width + x0, row * width + x1);
  }

  show(context) {
    context.putImageData(this.image, 0, 0);
  }
}

/** Convert a colour ("#rrggbb" or "#rgb") to a pixel. */
export function pixel(colour) {
  const hex = colour.length === 4 ? [...colour.slice(1)].map((digit) => digit + digit).join("") : colour.slice(1, 7);
  const [r, g, b] = [0, 2, 4].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
