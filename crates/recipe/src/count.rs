//! Counts as types, so that a step is never mistaken for an epoch or a rank.

/// Defines a number with a meaning: a newtype that is ordered, shown and serialised as its number.
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
            /// The one after this.
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
    /// Number of whole passes over the training data made so far.
    Epoch(u32)
}
