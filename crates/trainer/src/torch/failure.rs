//! libtorch's errors in this crate's words.

use tch::TchError;

use crate::learner::Error;

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
            Error::Torch { operation, message }
        })
    }
}
