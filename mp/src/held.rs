//! What is under way in one queue, oldest first, and what it holds until it is complete.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use gdsync::verbs::MrGuard;

use crate::few::Few;
use crate::peer::Piece;
use crate::request::{Message, Order};

/// Orders under way, each with the buffers that it keeps registered.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// First those under way. Behind them, those that are over: a new order takes the place of the oldest of these if no request has
    /// that any more, which is cheaper than memory of its own. There are never more than were under way once.
    all: VecDeque<Place>,
    under_way: usize,
    /// In the queue, of all that are under way.
    places: usize,
    /// What the newest keeps, and those right before it that keep the same: it is over last. So a row of messages of a buffer
    /// counts as one holder of that.
    newest: Option<Few<MrGuard>>,
}

/// Of an order, and what it keeps while it is under way, unless one behind it keeps the same.
#[derive(Debug)]
struct Place(Arc<Order>, Option<Few<MrGuard>>);

impl Held {
    /// Places in the queue that those under way take.
    #[inline]
    pub(crate) fn places(&self) -> usize {
        self.places
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way == 0
    }

    /// The newest order.
    pub(crate) fn newest(&self) -> Option<&Arc<Order>> {
        Some(&self.all[self.under_way.checked_sub(1)?].0)
    }

    /// The oldest order.
    #[inline]
    fn oldest(&self) -> Option<&Arc<Order>> {
        self.all.front().filter(|_| !self.is_empty()).map(|Place(order, _)| order)
    }

    /// All orders, oldest first.
    pub(crate) fn orders(&self) -> impl Iterator<Item = &Arc<Order>> {
        self.all.iter().take(self.under_way).map(|Place(order, _)| order)
    }

    /// Tells the CPU that the next order will be written soon: it was let go of long ago, and its two lines may be far away.
    #[inline]
    pub(crate) fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        if let Some(Place(order, _)) = self.all.get(self.under_way) {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            // The counts are right before it.
            let start = Arc::as_ptr(order).cast::<[usize; 2]>().wrapping_sub(1).cast::<i8>();
            // SAFETY: a hint.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(start) };
            // SAFETY: a hint.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(start.wrapping_add(64)) };
        }
    }

    /// Adds the newest order, of this message with these pieces, by the device for ranks of the same host or the other one; `make`
    /// makes those of this queue.
    #[inline]
    pub(crate) fn add(
        &mut self,
        message: Message,
        pieces: &[Piece<'_>],
        near: bool,
        make: impl FnOnce(Message) -> Order,
    ) -> Arc<Order> {
        let is_same = match (&self.newest, pieces) {
            (Some(Few::One(kept)), [(buffer, _)]) => kept.keeps(buffer.on(near)),
            _ => false,
        };
        if !is_same {
            let keep = Few::map(pieces, |(buffer, _)| buffer.on(near).guard());
            let before = self.newest.replace(keep);
            if let Some(newest) = self.under_way.checked_sub(1) {
                self.all[newest].1 = before;
            }
        }
        self.places += message.places as usize;
        let at = self.under_way;
        self.under_way += 1;
        let Some(Place(order, _)) = self.all.get_mut(at) else {
            let order = Arc::new(make(message));
            self.all.push_back(Place(order.clone(), None));
            return order;
        };
        match only(order) {
            Some(free) => free.renew(message),
            None => *order = Arc::new(make(message)),
        }
        order.clone()
    }

    /// Lets go of the newest orders for which this holds.
    pub(crate) fn drop_newest(&mut self, mut is_gone: impl FnMut(&Order) -> bool) {
        while let Some(order) = self.newest().filter(|order| is_gone(order)) {
            self.places -= order.places as usize;
            self.under_way -= 1;
            match self.under_way.checked_sub(1).map(|newest| self.all[newest].1.take()) {
                // The one before it keeps the same.
                Some(None) => {}
                Some(kept) => self.newest = kept,
                None => self.newest = None,
            }
        }
    }

    /// Lets go of what is complete, and keeps what came of it.
    pub(crate) fn settle(&mut self) {
        while self.oldest().is_some_and(|order| order.keep()) {
            self.drop_oldest();
        }
    }

    /// Somebody has seen that `order` is complete, with so many bytes: so are those before it.
    #[inline]
    pub(crate) fn finish(&mut self, order: &Arc<Order>, bytes: usize) {
        match self.oldest() {
            Some(oldest) if Arc::ptr_eq(oldest, order) => {
                order.kept.set(bytes);
                self.drop_oldest();
            }
            Some(oldest) if oldest.index() <= order.index() => self.settle(),
            // By whoever has seen a later one, too.
            _ => {}
        }
    }

    #[inline]
    fn drop_oldest(&mut self) {
        if let Some(Place(order, _)) = self.all.pop_front() {
            self.under_way -= 1;
            self.places -= order.places as usize;
            self.all.push_back(Place(order, None));
            if self.is_empty() {
                self.newest = None;
            }
        }
    }
}

/// The order, if nobody else has it. As [`Arc::get_mut`], which also locks out weak pointers: of orders there are none.
#[inline]
fn only(order: &mut Arc<Order>) -> Option<&mut Order> {
    if Arc::strong_count(order) != 1 {
        return None;
    }
    // Behind all that others did before they let go of it.
    fence(Ordering::Acquire);
    // SAFETY: this is the only pointer to it, and borrowed; no weak one is ever made that could become another.
    Some(unsafe { &mut *Arc::as_ptr(order).cast_mut() })
}

#[cfg(test)]
mod tests;
