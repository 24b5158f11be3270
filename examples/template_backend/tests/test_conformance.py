from torchkv.testing import Lane, TransportConformance


class TestTemplate(TransportConformance):
    lane = Lane("template", link="shared-memory", foreign_memory=False)
