//! Waits for a condition that another task fulfils.

use std::time::Duration;

use tokio::time::{sleep, timeout};

/// Timeout of a condition; only a failing test waits this long.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) async fn until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(TIMEOUT, poll).await.expect("the condition was not met in time");
}
