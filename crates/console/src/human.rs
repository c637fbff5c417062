//! Numbers, durations and dates as text for people.

use std::time::{Duration, UNIX_EPOCH};

/// A duration in at most two units.
pub fn duration(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX).as_secs();
    let (days, hours, minutes) = (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60);
    match whole {
        0..10 => format!("{:.1} s", seconds.max(0.0)),
        10..60 => format!("{whole} s"),
        60..3_600 => format!("{minutes} min {:02} s", whole % 60),
        3_600..86_400 => format!("{hours} h {minutes:02} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// How long ago something was, in one unit.
pub fn ago(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX).as_secs();
    match whole {
        0..60 => format!("{whole} s ago"),
        60..3_600 => format!("{} min ago", whole / 60),
        3_600..86_400 => format!("{} h ago", whole / 3_600),
        _ => format!("{} d ago", whole / 86_400),
    }
}

/// A number of bytes in decimal units.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    let mut amount = bytes as f64 / 1e3;
    let mut unit = 0;
    // 999.95 would be printed as 1000.0.
    while amount >= 999.95 && unit + 1 < UNITS.len() {
        amount /= 1e3;
        unit += 1;
    }
    format!("{amount:.1} {}", UNITS[unit])
}

/// A fraction of one as a percentage.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A number of any size, with at most six significant digits.
pub fn number(number: f64) -> String {
    // Formatting rounds to six digits; parsing and printing again removes trailing zeros.
    format!("{number:.5e}").parse::<f64>().unwrap_or(number).to_string()
}

/// A learning rate.
pub fn rate(rate: f64) -> String {
    if rate == 0.0 || (0.01..1e4).contains(&rate) {
        format!("{rate:.4}")
    } else {
        format!("{rate:.2e}")
    }
}

/// A whole number, its digits in groups of three.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number with its noun, in the plural unless the number is 1.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A time as `2026-11-21T09:15:08Z`.
pub fn utc(unix_seconds: u64) -> String {
    // Times after the year 9999 cannot be formatted.
    let moment = UNIX_EPOCH + Duration::from_secs(unix_seconds.min(LAST_SECOND));
    humantime::format_rfc3339_seconds(moment).to_string()
}

/// The last second of the year 9999, Unix seconds.
const LAST_SECOND: u64 = 253_402_300_799;

/// A time as `09:15:08Z`.
pub fn utc_time_of_day(unix_seconds: u64) -> String {
    // The date has the same length for every time.
    utc(unix_seconds).split_off("2026-11-21T".len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_at_most_two_units() {
        let shown = [0.42, 12.3, 192.0, 7_500.0, 100_000.0, f64::INFINITY, -1.0].map(duration);
        assert_eq!(shown[..5], ["0.4 s", "12 s", "3 min 12 s", "2 h 05 min", "1 d 3 h"]);
        assert!(shown[5].ends_with(" h"), "{}", shown[5]);
        assert_eq!(shown[6], "0.0 s");
    }

    #[test]
    fn ages_have_one_unit() {
        let shown = [-1.0, 59.9, 60.0, 3_599.0, 7_200.0, 200_000.0].map(ago);
        assert_eq!(shown, ["0 s ago", "59 s ago", "1 min ago", "59 min ago", "2 h ago", "2 d ago"]);
    }

    #[test]
    fn bytes_never_show_a_thousand() {
        let shown = [999, 1_000, 999_949, 999_999, 102_400_000, u64::MAX].map(bytes);
        assert_eq!(shown, ["999 B", "1.0 kB", "999.9 kB", "1.0 MB", "102.4 MB", "18446.7 PB"]);
    }

    #[test]
    fn numbers_have_six_digits_at_most() {
        let shown = [0.0, 2.0 / 3.0, -123_456_789.0, 1e-3, 2.5].map(number);
        assert_eq!(shown, ["0", "0.666667", "-123457000", "0.001", "2.5"]);
    }

    #[test]
    fn digits_are_grouped_by_three() {
        let shown = [0, 999, 1_000, 1_281_167].map(grouped);
        assert_eq!(shown, ["0", "999", "1,000", "1,281,167"]);
    }

    #[test]
    fn learning_rates_keep_their_digits() {
        assert_eq!([0.0, 0.8, 0.001, 3e-7].map(rate), ["0.0000", "0.8000", "1.00e-3", "3.00e-7"]);
    }

    #[test]
    fn dates_respect_leap_years() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(utc(1_795_252_508), "2026-11-21T09:15:08Z");
        assert_eq!(utc(u64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(utc_time_of_day(1_795_252_508), "09:15:08Z");
    }
}
