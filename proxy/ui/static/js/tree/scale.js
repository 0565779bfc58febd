// How large things are: what a column and a row measure at full size, and from which width on texts are shown.

export const COL = 176;
export const ROW = 40;
export const LABELS_FROM = 96;

/** A colour of 0 to 5 for a number: each step is a fourfold. */
export function level(value, unit) {
  return value <= 0 ? 0 : Math.max(1, Math.min(5, 1 + Math.ceil(Math.log(value / unit) / Math.log(4))));
}
