//! Converts libtorch's errors into this crate's errors.

use tch::TchError;

use crate::learner::{Error, MemoryKind};

/// Adds the name of the failed operation to an error.
pub(super) trait During<T> {
    /// Converts libtorch's error.
    fn during(self, operation: &'static str) -> Result<T, Error>;
}

impl<T> During<T> for Result<T, TchError> {
    fn during(self, operation: &'static str) -> Result<T, Error> {
        self.map_err(|error| {
            let text = match error {
                TchError::Torch(text) => text,
                other => other.to_string(),
            };
            // The lines after the first are a C++ backtrace.
            let message = text.lines().next().unwrap_or_default().to_owned();
            match memory_named_in(&message) {
                Some(memory) => Error::OutOfMemory { memory, operation, message },
                None => Error::Torch { operation, message },
            }
        })
    }
}

/// The kind of memory that was exhausted, judged by libtorch's message: its errors have no code.
fn memory_named_in(message: &str) -> Option<MemoryKind> {
    let contains = |words: &[&str]| words.iter().any(|words| message.contains(words));
    if !contains(&["out of memory", "bad_alloc", "can't allocate memory"]) {
        return None;
    }
    Some(if message.contains("CUDA") { MemoryKind::Gpu } else { MemoryKind::Host })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_messages_about_exhausted_memory_are_recognised() {
        for (words, memory) in [
            ("CUDA out of memory. Tried to allocate 20.00 GiB", Some(MemoryKind::Gpu)),
            ("std::bad_alloc", Some(MemoryKind::Host)),
            ("DefaultCPUAllocator: can't allocate memory: you tried to", Some(MemoryKind::Host)),
            ("CUDA error: an illegal memory access was encountered", None),
        ] {
            let failed: Result<(), _> = Err(TchError::Torch(format!("{words}\nbacktrace")));
            let error = failed.during("a test").unwrap_err();
            assert_eq!(error.out_of_memory(), memory, "{words}");
            assert_eq!(error.to_string(), format!("a test: {words}"));
        }
    }
}
