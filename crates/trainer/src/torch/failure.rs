//! libtorch's errors in this crate's words.

use tch::TchError;

use crate::learner::{Error, Memory};

/// Names the operation that failed.
pub(super) trait During<T> {
    /// Turns libtorch's error into ours.
    fn during(self, operation: &'static str) -> Result<T, Error>;
}

impl<T> During<T> for Result<T, TchError> {
    fn during(self, operation: &'static str) -> Result<T, Error> {
        self.map_err(|error| {
            let text = match error {
                TchError::Torch(text) => text,
                other => other.to_string(),
            };
            // What follows the first line is a C++ backtrace.
            let message = text.lines().next().unwrap_or_default().to_owned();
            match memory_named_in(&message) {
                Some(memory) => Error::OutOfMemory { memory, operation, message },
                None => Error::Torch { operation, message },
            }
        })
    }
}

/// The memory that libtorch says was too small; it gives texts only.
fn memory_named_in(message: &str) -> Option<Memory> {
    let says = |words: &[&str]| words.iter().any(|words| message.contains(words));
    if !says(&["out of memory", "bad_alloc", "can't allocate memory"]) {
        return None;
    }
    Some(if message.contains("CUDA") { Memory::Gpu } else { Memory::Host })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorchs_words_for_a_full_memory_are_understood() {
        for (words, memory) in [
            ("CUDA out of memory. Tried to allocate 20.00 GiB", Some(Memory::Gpu)),
            ("std::bad_alloc", Some(Memory::Host)),
            ("DefaultCPUAllocator: can't allocate memory: you tried to", Some(Memory::Host)),
            ("CUDA error: an illegal memory access was encountered", None),
        ] {
            let failed: Result<(), _> = Err(TchError::Torch(format!("{words}\nbacktrace")));
            let error = failed.during("a test").unwrap_err();
            assert_eq!(error.out_of_memory(), memory, "{words}");
            assert_eq!(error.to_string(), format!("a test: {words}"));
        }
    }
}
