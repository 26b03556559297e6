//! What sequences leave behind: pages that others with the same beginning share.

use fracbit_model::{Page, PageMemory, pages::POSITIONS};

/// Pages by the tokens they hold and those before them: a tree in which every node is a page, below
/// the page before it. Tokens are compared themselves, so no two beginnings are ever taken for one
/// another.
///
/// A node that is not whole has no children. All pages are of one model, pool and precision.
#[derive(Debug)]
pub struct Prefixes<M: PageMemory> {
    nodes: Vec<Node<M>>,
    /// Places of nodes that are gone.
    spare: Vec<usize>,
    roots: Vec<usize>,
    clock: u64,
}

#[derive(Debug)]
struct Node<M: PageMemory> {
    /// Up to [`POSITIONS`].
    tokens: Vec<u32>,
    /// `None`: the node is gone.
    page: Option<Page<M>>,
    parent: Option<usize>,
    children: Vec<usize>,
    used: u64,
}

/// As many tokens as two beginnings have in common.
pub(crate) fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl<M: PageMemory> Default for Prefixes<M> {
    fn default() -> Self {
        Self { nodes: Vec::new(), spare: Vec::new(), roots: Vec::new(), clock: 0 }
    }
}

impl<M: PageMemory> Prefixes<M> {
    fn below(&self, node: Option<usize>) -> &[usize] {
        node.map_or(&self.roots, |node| &self.nodes[node].children)
    }

    /// The pages of the longest beginning of `tokens` that is there, and its tokens; the last page
    /// may hold others behind them.
    pub fn find(&mut self, tokens: &[u32]) -> (Vec<Page<M>>, usize) {
        self.clock += 1;
        let (mut pages, mut len, mut node) = (Vec::new(), 0, None);
        loop {
            let rest = &tokens[len..];
            let same = |&n: &usize| (common(&self.nodes[n].tokens, rest), n);
            let Some((more, best)) = self.below(node).iter().map(same).max().filter(|&(more, _)| more > 0)
            else {
                return (pages, len);
            };
            let found = &mut self.nodes[best];
            found.used = self.clock;
            pages.push(found.page.clone().expect("nodes of the tree have pages"));
            len += more;
            if more < POSITIONS {
                return (pages, len);
            }
            node = Some(best);
        }
    }

    /// Keeps the pages of `tokens`, unless it has others of the same.
    ///
    /// # Panics
    /// When there are not as many pages as the tokens take.
    pub fn insert(&mut self, tokens: &[u32], pages: &[Page<M>]) {
        assert_eq!(pages.len(), tokens.len().div_ceil(POSITIONS), "the pages of all tokens");
        self.clock += 1;
        let mut parent = None;
        for (tokens, page) in tokens.chunks(POSITIONS).zip(pages) {
            let same = |&n: &usize| (common(&self.nodes[n].tokens, tokens), n);
            let like = self.below(parent).iter().map(same).max();
            let node = match like {
                // All of it is there.
                Some((len, node)) if len == tokens.len() => node,
                // A part of it is: it grows.
                Some((len, node)) if len == self.nodes[node].tokens.len() => {
                    self.nodes[node].tokens = tokens.to_vec();
                    self.nodes[node].page = Some(page.clone());
                    node
                }
                _ => self.add(parent, tokens, page),
            };
            self.nodes[node].used = self.clock;
            parent = Some(node);
        }
    }

    fn add(&mut self, parent: Option<usize>, tokens: &[u32], page: &Page<M>) -> usize {
        let (page, tokens, used) = (Some(page.clone()), tokens.to_vec(), self.clock);
        let new = Node { tokens, page, parent, children: Vec::new(), used };
        let at = self.spare.pop().unwrap_or(self.nodes.len());
        if at == self.nodes.len() {
            self.nodes.push(new);
        } else {
            self.nodes[at] = new;
        }
        match parent {
            None => self.roots.push(at),
            Some(parent) => self.nodes[parent].children.push(at),
        }
        at
    }

    /// Pages that nobody else holds.
    #[must_use]
    pub fn evictable(&self) -> usize {
        self.nodes.iter().filter(|node| node.page.as_ref().is_some_and(Page::alone)).count()
    }

    /// Gives up the page that was used least recently, of those that nobody else holds and no other
    /// depends on. `false`: there is none.
    pub fn evict(&mut self) -> bool {
        let free = |node: &Node<M>| node.children.is_empty() && node.page.as_ref().is_some_and(Page::alone);
        let all = self.nodes.iter().enumerate().filter(|(_, node)| free(node));
        let Some(at) = all.min_by_key(|(_, node)| node.used).map(|(at, _)| at) else { return false };
        let Node { page, parent, .. } = &mut self.nodes[at];
        *page = None;
        let siblings = match *parent {
            None => &mut self.roots,
            Some(parent) => &mut self.nodes[parent].children,
        };
        siblings.retain(|&node| node != at);
        self.spare.push(at);
        true
    }
}
