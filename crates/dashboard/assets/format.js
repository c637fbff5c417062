// Formats numbers for people. An unknown value is a dash.

export const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const whole = (value) => (known(value) ? grouped.format(value) : NONE);

export const decimal = (value, digits = 3) => {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(2);
  return value.toFixed(size >= 100 ? Math.min(digits, 1) : digits);
};

export const metricNumber = (it) => (it?.is_fraction ? percent(it.value, 2) : decimal(it?.value));

// A value that is not a fraction has the metric's name.
export const metricValue = (it) => (!it || it.is_fraction ? metricNumber(it) : `${metricNumber(it)} ${it.name}`);

export const percent = (share, digits = 1) => (known(share) ? `${(share * 100).toFixed(digits)} %` : NONE);

export const dollars = (value) => (known(value) ? `$${value.toLocaleString("en", {
  minimumFractionDigits: 2,
  maximumFractionDigits: 2,
})}` : NONE);

export const bytes = (value) => {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  let size = value;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${units[unit]}`;
};

/** 350 ms, 1.2 s, 12 s, 3 min 12 s, 2 h 05 min, 3 d 4 h. */
export const duration = (seconds) => {
  if (!known(seconds)) return NONE;
  if (seconds < 0.9995) return `${Math.max(0, seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${two(total % 60)} s`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${two(Math.floor((total % 3600) / 60))} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
};

/** The local time, with the date if it is not today. */
export const clock = (unixMillis) => {
  if (!known(unixMillis) || unixMillis <= 0) return NONE;
  const at = new Date(unixMillis);
  const two = (value) => String(value).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  if (at.toDateString() === new Date().toDateString()) return time;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
};
