// Sizes of the map: columns and rows at full scale, and the width from which labels are shown.

export const COL = 176;
export const ROW = 40;
export const LABELS_FROM = 96;

/** Return the colour step (0 to 5) of a number: each step is four times the one before. */
export function level(value, unit) {
  return value <= 0 ? 0 : Math.max(1, Math.min(5, 1 + Math.ceil(Math.log(value / unit) / Math.log(4))));
}
