//! Newtypes for counts, so that a step cannot be confused with an epoch or a rank.

/// Defines a newtype for a number; ordering, display and serialization are those of the number.
#[macro_export]
macro_rules! count {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            ::serde::Serialize, ::serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// The next number.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

count! {
    /// Number of optimizer updates made so far.
    Step(u64)
}
count! {
    /// Number of complete epochs (passes over the training data) so far.
    Epoch(u32)
}
