//! Signals that this process ignores, or was started to ignore.

use std::{fs, sync::Arc};

/// Makes a write beyond the limit of `ulimit -f` an error like any other. The signal of the kernel would end the process,
/// without a word.
pub fn ignore_file_size_signal() {
    // Fails only for signals that may not be caught.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
}

/// Whether this process was started with a signal ignored, as `nohup` does with SIGHUP. Call it before the signal gets a
/// handler.
#[must_use]
pub fn is_ignored(signal: i32) -> bool {
    // There is no safe call for this, so read what the kernel says (proc_pid_status(5)).
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignored_in(&status, signal)
}

fn ignored_in(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let bit = u32::try_from(signal - 1).ok().and_then(|bit| 1_u64.checked_shl(bit));
    mask.zip(bit).is_some_and(|(mask, bit)| mask & bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_beyond_the_limit_of_a_file_is_an_error() {
        ignore_file_size_signal();
        // Without the handler, this ends the process of the test.
        signal_hook::low_level::raise(signal_hook::consts::SIGXFSZ).unwrap();
    }

    #[test]
    fn ignored_signals_are_bits_of_a_mask() {
        let status =
            "Name:\tbaton\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        let ignored = (0..70).filter(|signal| ignored_in(status, *signal));
        assert_eq!(ignored.collect::<Vec<_>>(), [1, 13]);
        assert!(!ignored_in("", 1));
    }
}
