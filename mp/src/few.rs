//! A list that takes no allocation while it has one element, as nearly all lists here have.

use std::slice;

#[derive(Debug)]
pub(crate) enum Few<T> {
    None,
    One(T),
    Many(Vec<T>),
}

impl<T> Few<T> {
    /// One for each of `items`.
    #[inline]
    pub(crate) fn map<S>(items: &[S], of: impl Fn(&S) -> T) -> Self {
        match items {
            [item] => Self::One(of(item)),
            items => items.iter().map(of).collect(),
        }
    }

    // Always inline: the one element is written where it stays, not copied there.
    #[inline(always)]
    pub(crate) fn push(&mut self, item: T) {
        match self {
            Self::None => *self = Self::One(item),
            Self::One(_) | Self::Many(_) => self.push_behind(item),
        }
    }

    #[cold]
    fn push_behind(&mut self, item: T) {
        let mut items: Vec<T> = match std::mem::replace(self, Self::None) {
            Self::None => Vec::new(),
            Self::One(first) => vec![first],
            Self::Many(items) => items,
        };
        items.push(item);
        *self = Self::Many(items);
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::None => &[],
            Self::One(item) => slice::from_ref(item),
            Self::Many(items) => items,
        }
    }

    pub(crate) fn first_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::None => None,
            Self::One(item) => Some(item),
            Self::Many(items) => items.first_mut(),
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut items = items.into_iter();
        match (items.next(), items.next()) {
            (None, _) => Self::None,
            (Some(only), None) => Self::One(only),
            (Some(first), Some(second)) => Self::Many([first, second].into_iter().chain(items).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pushed_is_there_in_order() {
        let mut few = Few::None;
        assert!(few.as_slice().is_empty() && few.first_mut().is_none());
        for n in 1..=5 {
            few.push(n);
            assert_eq!(few.as_slice(), (1..=n).collect::<Vec<_>>());
            assert_eq!(few.first_mut(), Some(&mut 1));
            assert_eq!((1..=n).collect::<Few<_>>().as_slice(), few.as_slice());
        }
    }
}
