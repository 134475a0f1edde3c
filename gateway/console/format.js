// @ts-check
// Numbers as people read them.

/** @param {number} ms */
export function duration(ms) {
  if (ms < 0.05) return "0 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

/** @param {number} bytes */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${bytes.toFixed(unit === 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2).replace(/\.0+$/, "")} ${units[unit]}`;
}

/** @param {number} value */
export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

/** @param {number} perSecond */
export function rate(perSecond) {
  return perSecond === 0 || perSecond >= 10 ? count(perSecond) : perSecond.toFixed(1);
}

/** @param {number} share */
export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 1) return "<1 %";
  return `${value > 99 && value < 100 ? 99 : Math.round(value)} %`;
}

/** @param {number} unixMs */
export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB");
}

/**
 * @param {number} n
 * @param {string} one
 * @param {string} [many]
 */
export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}
