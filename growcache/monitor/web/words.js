/* Numbers and durations in words, as the terminal writes them. */

const format = globalThis.drawCharts.format;

export const inBytes = format.bytes;
export const inPercent = format.percent;

export function inCount(number) {
  if (Math.abs(number) < 1e6) return Math.round(number).toLocaleString("en-US");
  const [value, word] = Math.abs(number) < 999.5e6 ? [number / 1e6, "million"] : [number / 1e9, "billion"];
  return `${value.toFixed(Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0)} ${word}`;
}

export function inTime(seconds) {
  const whole = Math.round(Math.max(0, seconds));
  if (whole <= 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function plural(number, one, many) {
  return `${inCount(number)} ${number === 1 ? one : many ?? `${one}s`}`;
}
